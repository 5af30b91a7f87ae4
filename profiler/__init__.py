"""What do kernels and collectives really take on this machine?"""
