"""Policies and patterns that are judged side by side, each with a name of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .._checks import check_kind, refuse
from ..patterns import Pattern
from ..policy import Policy, check_policy

__all__ = ["DENSE_NAME", "check_name", "named_policies", "numbered"]

#: The name of dense attention, beside which all are judged.
DENSE_NAME = "dense"


def named_policies(
    owner: str, policies: Any, argument: str = "policies", one: str = "policy"
) -> dict[str, Policy | Pattern]:
    """Return policies and patterns by name; sentences name `argument` and `one`.

    Those of a list are named by their pattern, policies with patterns by layer or head "policy";
    equal names are numbered.
    """
    if isinstance(policies, (Policy, Pattern)):
        policies = [policies]
    if not isinstance(policies, Mapping):
        what = "a policy, a list of policies, or a mapping of name to policy"
        kinds = Policy if isinstance(policies, (str, torch.Tensor)) else Iterable
        check_kind(owner, argument, policies, kinds, what)
        policies = numbered(policies)
    for name, policy in policies.items():
        check_policy(owner, f"{one} {name}", policy, "one")
        check_name(owner, name)
    return dict(policies)


def check_name(owner: str, name: object) -> None:
    """Raise ``ValueError`` where what is judged has the name of dense attention."""
    if name == DENSE_NAME:
        raise refuse(owner, f"names beside {DENSE_NAME!r}, which dense attention has", repr(name))


def numbered(policies: Iterable[Any]) -> dict[str, Any]:
    """Return policies and patterns by their own names, of which equal ones have numbers."""
    found: dict[str, Any] = {}
    for policy in policies:
        own, number = _name(policy), 2
        name = own
        while name in found:
            name, number = f"{own} ({number})", number + 1
        found[name] = policy
    return found


def _name(policy: Any) -> str:
    if isinstance(policy, Pattern):
        return repr(policy)
    if not isinstance(policy, Policy):  # for the sentence that refuses it
        return f"{' '.join(repr(policy).split()):.40}"
    return "policy" if policy.layers or policy.heads else repr(policy.pattern)
