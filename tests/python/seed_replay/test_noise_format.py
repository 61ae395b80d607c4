"""The golden perturbations follow from FORMAT.md alone; tests/cpp/kernels/noise_test.cpp holds the library's forms to them."""

import re

import noise_by_hand


def test_golden_values_follow_from_the_document():
    assert noise_by_hand.GOLDEN.read_text() == noise_by_hand.golden()


def test_known_answers_of_the_document():
    text = noise_by_hand.section()
    seeds = re.findall(r"seed\(([\d, ]+)\) = 0x([0-9a-f]{16})", text)
    assert len(seeds) == 2
    for numbers, answer in seeds:
        assert noise_by_hand.seed_of(*map(int, numbers.split(","))) == int(answer, 16)
    rows = re.findall(r"^\| (\d+) \| ([0-9a-f]{8}) \(.*\) \| (\S+) \|$", text, re.M)
    assert len(rows) == 9
    seed = noise_by_hand.seed_of(*noise_by_hand.SAMPLE)
    for e, bits, sign in rows:
        gaussian, rademacher = (
            noise_by_hand.noise(kind, seed, noise_by_hand.TENSOR, int(e), 1) for kind in ("gaussian", "rademacher")
        )
        assert f"{gaussian.view('uint32')[0]:08x}" == bits
        assert rademacher[0] == float(sign.replace("−", "-"))
