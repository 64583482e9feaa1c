"""The OpenAI-compatible gateway: one chat API in front of a small and a large worker.

request    what a client asked, and what a worker is asked for it
routes     what a client may write into `model`
cascade    small first, keep or escalate, lift, answer: the one place that decides
attempt    one chat call to one worker: its events, limits and retries
events     what one event of an answer means
reply      the answer as the client sees it
lifting    may this pair lift, and the call that does it
worker     HTTP to one worker
health     which workers are up, and what they can do
record     what happened to a request: headers and extension field
gateway    these parts, put together for one config
config, yaml_source, locate    the YAML file
app, serve    the HTTP surface, and the server that drains
processes, supervisor, up, cli    the processes around it
"""
