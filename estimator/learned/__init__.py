"""What regressors learn of how much work a job still has, and of how long calls take: features, trees,
and their trainer.

Only ``boosting`` imports scikit-learn, in the trainer's process. The core walks the trees.
"""
