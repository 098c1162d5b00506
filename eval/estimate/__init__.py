"""How well the estimator foresees tool calls and turns: on recorded jobs, against simpler ways."""
