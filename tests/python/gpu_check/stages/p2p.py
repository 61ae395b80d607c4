"""Messages of device tensors with and without a codec, and coalesced ops, where no NCCL is: host copies of them travel."""

import device_trainings as trainings


def p2p(t):
    facts = {}
    for policy in ("", "p2p=minmax8:bucket=64"):
        t.init(policy=policy)
        facts[policy or "exact"] = t.compare(trainings.messages, trainings.coalesced)
    return facts
