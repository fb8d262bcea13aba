"""Starts, asks and ends processes that work for another one. Torch-free.

`Interpreter` is a fresh interpreter that calls one function with a connection to this process; `ThreadedInterpreter` is
one whose messages two threads carry. `Child` is one in a sandbox, that loads what takes long once and answers each
request in a process forked from it. `ForkedWorkers` is a loop that forks, feeds and ends workers. `Channel`,
`call_within` and `frames_of` are the messages, deadlines and tracebacks of all of them. Nothing is imported here: every
process of these kinds would wait for it.
"""
