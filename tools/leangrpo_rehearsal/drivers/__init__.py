"""Small training scripts for upstreams that ship a trainer class and no script; `Script.driver` names them."""
