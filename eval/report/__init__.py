"""Results: metrics, intervals, comparisons, tables, plots and pages."""
