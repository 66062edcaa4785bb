"""What every page of ottava is made of: its frame and looks, line charts, and what answers the pointer."""
