"""What a run tells: metrics, progress, samples, timeline, memory."""
