"""From files to token ids, batches and micro-batches."""
