"""Learned regressors of a job's remaining work and of calls' durations: features, trees, and their trainer.

Only ``boosting`` imports scikit-learn, in the trainer's process. The core evaluates the trees.
"""
