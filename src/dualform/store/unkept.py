"""What cannot be answered because it was not kept, and what to record instead: one text for all who refuse."""

from __future__ import annotations

from dualform.errors import NotRecordedError
from dualform.layers.layer import Layer
from dualform.store.reader import Store

REASONS = {
    "projected": "keeps random projections of gradients, from which sums are estimated and not known",
    "keys": "keeps keys only, and no error signals",
}


def why_no_gradients(store: Store, layer: Layer) -> str | None:
    """Return why a layer's part of each gradient cannot be put together again; None: it can."""
    if store.manifest.every > 1:
        return f"only the slots of one step in {store.manifest.every} are kept (every=)"
    if layer.explains_gradients:
        return None
    return f"layer {layer.name!r} {REASONS[layer.keep]} (keep={layer.keep!r})"


def why_not_rebuilt(store: Store, parameter: str) -> str | None:
    """Return why the gradients of a parameter cannot be put together again; None: they can."""
    reasons = [why_no_gradients(store, layer) for layer in store.users(parameter)]
    return next((reason for reason in reasons if reason is not None), None)


def require_gradients(store: Store, question: str, parameter: str | None = None) -> None:
    """Raise NotRecordedError unless the gradients of a parameter (default: of all) can be put together again."""
    names = [parameter] if parameter is not None else [known.name for known in store.manifest.parameters]
    for name in names:
        reason = why_not_rebuilt(store, name)
        if reason is not None:
            raise NotRecordedError(
                f'{question} needs every slot as it was, but in {store.location} {reason}. Record with keep="slots", or with keep="rows" for '
                f"answers by row."
            )
