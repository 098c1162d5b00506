"""Code that runs only on a GPU, or in Triton's interpreter: kernels, the step on the device, graphs."""
