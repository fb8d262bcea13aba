"""What a run does: functions over roles, each of which reads as its algorithm is written down."""
