"""The text of a small experiment."""

SMALL = """\
name: small
description: Two schedulers on a small load.
seed: 7
model: gpt3-175b
device: a100-80g-sxm
workload:
  requests: 60
  lengths: {kind: uniform, min: 200, max: 600}
  pd_ratio: 5
cluster: {tp: 8, pp: 8, max_length: 1024}
batching: {max_batch: 4}
policy: {name: orca, case: best}
scenarios:
  orca: {}
  sarathi: {policy: {name: sarathi, chunk_size: 256}}
compare:
  speedup: {metric: makespan_s, over: [orca, sarathi], paper: 1.5}
"""
