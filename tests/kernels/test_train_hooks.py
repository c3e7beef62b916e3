"""Stamps around a model's units, however its layers are called; and a lead that is doubled until the host is ahead."""

import pytest

pytest.importorskip("torch", reason="torch is not installed; `make test-kernels` runs these")

import torch
from torch import nn

from odc_kernels import calibrate_timing
from odc_kernels.calibrate_timing import LONGEST_LEAD_S, MOST_LATE, Item, Plan, _one_pass
from odc_kernels.train_hooks import Hooks
from odc_kernels.train_recorder import Recorder


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, hidden):
        return self.inner(hidden)


class Net(nn.Module):
    def __init__(self, *, by_name, frozen):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.by_name = by_name
        if frozen:
            self.embedding.requires_grad_(False)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden=hidden) if self.by_name else layer(hidden)
        return hidden.sum()


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_every_unit_has_a_forward_and_what_is_trained_a_backward(by_name, frozen):
    net, recorder = Net(by_name=by_name, frozen=frozen), Recorder(torch.device("cpu"))
    Hooks(recorder, net, net.layers)
    recorder.begin()
    recorder.microbatch(0)
    net(torch.tensor([1, 2])).backward()
    rows = recorder.resolve(recorder.end())[2]
    spans = [(row.kind, row.unit) for row in sorted(rows, key=lambda row: row.start_s) if row.stream == "compute"]
    assert spans[:4] == [("forward", 0), ("forward", 1), ("forward", 2), ("head_loss", 0)]
    assert ("backward", 2) in spans
    assert (("backward", 1) in spans) or frozen
    assert spans.count(("backward", 0)) == (1 if frozen else 2)


class Slow:
    """A host that is ahead from a certain lead on."""

    def __init__(self, enough_s):
        self.device = torch.device("cpu")
        self.enough_s = enough_s
        self.leads_s = []

    def rounds(self, steps, plan):
        self.leads_s.append(plan.lead_s)
        return [[1.0] * plan.samples for _ in steps], 0.0 if plan.lead_s >= self.enough_s else 2 * MOST_LATE


@pytest.mark.parametrize(
    ("enough_s", "long", "leads_s"),
    [
        (0.0, False, [0.01]),
        (0.03, False, [0.01, 0.02, 0.04]),
        (0.03, True, [0.01]),  # keeps the host ahead by itself
        (1e9, False, [0.01 * 2**n for n in range(7)]),
    ],
)
def test_a_lead_is_doubled_until_the_host_is_ahead(monkeypatch, enough_s, long, leads_s):
    monkeypatch.setattr(calibrate_timing, "agree_max", lambda value, device: value)
    monkeypatch.setattr(calibrate_timing, "over_ranks", lambda seconds, how: seconds)
    pace = Slow(enough_s)
    plan = Plan(untimed=1, samples=2, long=long, lead_s=0.01, clock=lambda: 0.0)
    item = Item(name="", make=lambda: [lambda: None], work=1.0)
    assert _one_pass(item, pace, plan, "max") == [[1.0, 1.0]]
    assert pace.leads_s == pytest.approx(leads_s)
    assert leads_s[-1] / 2 <= LONGEST_LEAD_S
