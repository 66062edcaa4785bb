"""What one cast did to one tensor: sums, the walk that fills them, and statistics made of them."""
