"""What training libraries need of a pretended GPU, told when a script imports them."""
