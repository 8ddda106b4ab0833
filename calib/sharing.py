"""What each model pays for sharing one set of scales with others."""

from __future__ import annotations

from typing import Any

from .calibrate import Calibration
from .cost import head_costs


def sharing_costs(calibration: Calibration) -> list[dict[str, Any]]:
    """Per member the signal-to-noise ratio it loses to shared scales, in dB; empty for one member.

    Returns:
        Dicts with ``name``, ``mean_loss_db``, ``worst_loss_db`` and ``worst``, the head that
        pays most.
    """
    if len(calibration.members) == 1:
        return []
    costs = []
    for member in calibration.members:
        heads = head_costs(member.stats, calibration.scales, member.scales)
        worst = max(heads, key=lambda head: head.loss_db)
        costs.append(
            {
                "name": member.name,
                "mean_loss_db": sum(head.loss_db for head in heads) / len(heads),
                "worst_loss_db": worst.loss_db,
                "worst": str(worst),
            }
        )
    return costs
