"""Turns files of rows into token ids, batches and micro-batches."""
