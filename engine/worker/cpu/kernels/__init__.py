"""The code that is compiled for the machine at hand, and how it is built."""
