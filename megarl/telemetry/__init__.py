"""What a run tells about itself: time per phase, metric files, progress, sample rollouts, the learning curve."""
