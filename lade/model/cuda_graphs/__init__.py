"""Forward passes captured as CUDA graphs, with static caches.

    runner.py ──▶ fallback_cache.py ──▶ static_cache.py ──▶ static_rows.py    rows in buffers at fixed addresses
        │                                     └───────────▶ pool.py           acquires and releases buffers
        │         (buffers.py, states.py)                   └──▶ capture.py   captures passes on them
        └───────▶ inputs.py, ancestry.py, cache_view.py                       what a pass reads

Only `lade.model.select_runner` imports this folder.
"""
