"""Jobs, their branches, and how a prompt continues a job."""
