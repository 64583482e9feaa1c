"""Load tests: what users feel when load rises, with and without the lift.

schedule, traces    when requests arrive
prompts             what they ask
client              one request over a kept-alive connection
systems             what is compared, as configurations
generator           the open loop
rows                one record per request, and what many of them say
locustfile, locust_options, locust_session    the same under locust
simulate, predict   a batch server reckoned instead of run, and what it says of a run's systems
servers, lineup     the workers between the loads, and the systems on them by name
bench               one load after another from the same start
mu, bracket         saturation: equation 10 and S(b), and a whole system by bisection
sweep, protocols    every system at every load; what is measured in half an hour, and in all
run                 a run's folder
summary             from rows to figures
tables, plots, page, report    what a run shows
setup, conduct, progress, cli  the load pair started for a command, and the command
errors              what can go wrong
"""
