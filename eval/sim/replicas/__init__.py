"""The engines of a simulation, and the routers in front of them."""
