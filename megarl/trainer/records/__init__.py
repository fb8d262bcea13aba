"""Records of a run: metrics, progress, samples, timeline, memory."""
