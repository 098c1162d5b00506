"""What runs on a GPU only, or in Triton's interpreter: kernels, the step on the device, graphs."""
