"""Ways into ottava from other training libraries: thin modules that speak a host's own plug-in protocol.

A door makes no numbers. It converts the model at the moment that its host allows, keeps the host's checkpoints whole,
and puts measurements where the host logs. Nothing else imports a host, and each door imports its own only.
"""
