"""What answers the policy between its turns: environments, tools, and agents with a loop of their own."""
