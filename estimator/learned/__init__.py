"""What a regressor learns of how much work a job still has: features, trees, and their trainer.

Only the trainer imports scikit-learn, in a process of its own. The core walks the trees.
"""
