"""PLD and Rényi figures against δ(ε) by another way: the privacy loss's transform, inverted along a line.

δ(ε) = 1/(2πi) ∫ exp(K(z) − zε) / (z(z+1)) dz over any line z = t + iy with t > 0, K(z) = Σ count·ln E_Q[(P/Q)^(z+1)].
On the line through the saddle point the integrand is as small as δ itself, so that nothing is lost by rounding however
small δ is. Nothing is rounded to a grid of losses, and dp_accounting is not asked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from equidp.accounting.calibration import calibrate
from equidp.accounting.epsilon import REPORT_INTERVAL, SEARCH_INTERVAL, epsilon, epsilon_path, pld_epsilon
from equidp.accounting.events import Event
from equidp.accounting.trade_off import trade_off

POINTS = np.arange(-14.0, 40.0, 0.05)
"""Where integrals under the noise are summed; for analytic functions this is exact to the last digits."""


def transform(z: np.ndarray, event: Event) -> np.ndarray:
    """K(z) of one event, P sampled; without cancellation where it is near 0, as E_Q[P/Q] = 1."""
    shift = 1 / event.noise_multiplier
    more = event.sampling_rate * np.expm1(shift * POINTS - shift * shift / 2)  # P/Q − 1
    weight = math.log(POINTS[1] - POINTS[0]) - math.log(2 * math.pi) / 2 - POINTS * POINTS / 2
    power = (z + 1)[:, None]
    grown = power * np.log1p(more)
    large = grown.real > 30
    small = np.expm1(np.where(large, 0, grown)) - power * np.where(large, 0, more)
    mean = np.where(large, np.exp(np.where(large, grown + weight, 0)), small * np.exp(weight)).sum(1)
    modulus = 0.5 * np.log1p(2 * mean.real + mean.real**2 + mean.imag**2)
    return event.count * (modulus + 1j * np.arctan2(mean.imag, 1 + mean.real))


def exact_delta(events: Sequence[Event], at: float) -> float:
    """δ at ε = `at`, of a record that is taken away."""

    def exponent(z: np.ndarray) -> np.ndarray:
        return sum(transform(z, event) for event in events) - z * at - np.log(z * (z + 1))

    saddles = np.geomspace(0.05, 12, 100)
    with np.errstate(over="ignore", invalid="ignore"):  # at saddles far away, which are not taken
        heights = exponent(saddles.astype(complex)).real
    top, height = saddles[np.nanargmin(heights)], np.nanmin(heights)
    reach = 1e-2
    while exponent(np.array([top + 1j * reach]))[0].real > height - 30:
        reach *= 1.3
    along = np.linspace(0, reach, 4001)
    values = np.exp(exponent(top + 1j * along) - height).real
    return float(np.trapezoid(values, along) / math.pi * math.exp(height))


def long_run(noise: float) -> list[Event]:
    """At a noise of 0.6 dp_accounting's powers of its Fourier coefficients take up to 3e-11 from δ."""
    return [Event(1e-4, noise, 290_000)]


LONG = long_run(0.6)


@pytest.mark.parametrize(
    ("event", "delta"),
    [
        pytest.param(Event(0.01, 1.0, 1000), 1e-5, marks=pytest.mark.slow),
        (Event(0.1, 2.0, 100), 1e-9),
        # ε = 124, on a grid nineteen times as coarse
        pytest.param(Event(0.05, 0.5, 3000), 1e-5, marks=pytest.mark.slow),
        (Event(0.01, 0.3, 1000), 1e-5),  # integer Rényi orders alone say ε > 2,000
    ],
)
def test_pld_is_as_exact_as_its_grid(event: Event, delta: float) -> None:
    assert 0.999 * delta < exact_delta([event], pld_epsilon([event], delta, REPORT_INTERVAL)) <= delta


@pytest.mark.parametrize(
    ("delta", "interval"), [(1e-10, REPORT_INTERVAL), (1e-11, SEARCH_INTERVAL), (1e-12, REPORT_INTERVAL)]
)
def test_no_figure_is_below_the_true_one_where_rounding_is_as_large_as_delta(delta: float, interval: float) -> None:
    assert exact_delta(LONG, epsilon(LONG, delta, interval=interval).value) <= delta


def test_nor_is_one_along_the_run() -> None:
    assert exact_delta(LONG, epsilon_path([LONG], 1e-11)[-1].value) <= 1e-11


def test_noise_is_enough_where_rounding_is_as_large_as_delta() -> None:
    assert exact_delta(long_run(calibrate(long_run, 3.573, 1e-11)), 3.573) <= 1e-11


@pytest.mark.slow
def test_a_target_is_met_where_rounding_differs_from_grid_to_grid() -> None:
    """By PLD's coarse grid a noise of 0.780 would do: a figure by the fine one, and by Rényi divergences, is 2.04."""
    assert epsilon(long_run(calibrate(long_run, 2.0, 2.7e-10)), 2.7e-10).value <= 2.0


def test_the_trade_off_curve_is_below_the_true_one_where_rounding_is_as_large_as_delta() -> None:
    curve = trade_off(LONG, 1e-11, 4.8)
    assert curve is not None
    for at, delta in list(zip(curve.epsilons, curve.deltas, strict=True))[100:160:15]:
        assert exact_delta(LONG, at) <= delta
