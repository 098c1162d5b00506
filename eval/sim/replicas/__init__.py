"""The engines of a simulation, and the routers before them."""
