"""The OpenAI-compatible gateway: one chat API in front of a small and a large worker.

request    what a client asked, and what a worker is asked for it
routes     what a client may write into `model`
cascade    small first, keep or escalate, lift, answer: the one place that decides
attempt    one answer of one worker: its events, inside its limits
call, budget    who takes a call, retries, and what is left of both
events     what one event of an answer means
reply      the answer as the client sees it
lifting    may this pair lift, and the call that does it
worker, connections    HTTP to one worker
health     which workers are up, and what they can do
breaker    which of them are not called, because calls fail
fleet      the workers of one tier, and which of them is asked
conversation    which conversation a request goes on with
access, admission    whose request it is, and when it is served
record     what happened to a request: headers and extension field
gateway    these parts, put together for one config
telemetry/ what the router tells of itself: metrics, spans, logs, the last decisions
page/      the page at `/`, where a person looks and chats
config/, yaml_source, locate    the YAML file
app, serve    the HTTP surface, and the server that drains
processes, supervisor, up, cli    the processes around it
"""
