"""The benchmark: what a superstep, a read and a stored byte cost with this saver and with its alternatives.

    make bench                                  everything, half an hour and more
    make bench BENCH_ARGS=--quick               smaller sizes, a minute or two
    make bench BENCH_ARGS="--only superstep --peers lsm-file,sqlite --rounds 9"
    python -m tools.bench.report                tables and plots again, from the last results
    python -m tools.bench.profile               where the time of put, put_writes and latest goes

Results are written after each workload, so that a run that is interrupted leaves what it has.

How it works: each peer (a saver on a kind of storage) runs in a worker process of its own, with an interpreter
of its own where its dependencies clash with ours. The orchestrator walks through the workloads; for each it has
every peer store what the workload starts from, then measures in rounds: A B C, B C A, ... so that whatever else the
machine does meets all of them alike, and ratios are taken within a round. S3 is a real server (moto's) behind a
proxy that counts requests and delays each. What is stored to begin with goes past the proxy, side by side, and is not
measured. A peer that would take too long over a workload is left out of it, and the tables say so.

The modules, and the question that each answers:

    conversation    what do the messages look like?
    loop            in which order, with which arguments, does LangGraph call a saver?
    workloads       what is measured?
    peers           how is each saver made, and what can it not do?
    environments    which interpreter runs a peer?
    services        where do peers store: directories, S3, Postgres?
    postgres        how is a Postgres server started and stopped?
    worker          what runs inside a peer's process?
    orchestrator    who measures what, when?
    results         what do the samples say: medians, spread, ratios, dollars?
    targets         what did we set out to reach, and did we?
    report          tables and plots
    profile         flame graphs

Rules of this package: times are taken here and nowhere else (tests assert counts). A number that cannot be had is
missing with its reason, never guessed. An answer of a saver that is wrong is a failure, never a fast time.
"""
