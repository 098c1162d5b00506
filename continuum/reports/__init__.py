"""Reports: receipts, the status of jobs, metrics, history, the policy's trace."""
