"""Evaluates the estimator's predictions of tool calls and turns on recorded jobs, against simpler methods."""
