"""What the router tells of itself: metrics, spans, logs, and the last decisions. None holds prompt text or keys.

observer     follows one request and tells the others of it, once, at its end
metrics      counters and histograms, all read off the request's `Record`
standing     gauges, read off the gateway when they are asked for
labels       the closed set of words that may stand in a label
tracing      spans, from the client's `traceparent` to each call of a worker
logs         lines of text or JSON, with the request's and the trace's id
decisions    the last requests and the totals, for the page
routes       /metrics and /status
trace_tree, cli    `kvlift trace`
"""
