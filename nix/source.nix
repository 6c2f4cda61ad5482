# The files the package is built from; anything else may change without a rebuild.
let
  wanted = [
    "README.md"
    "intern_decision_serve"
    "nix"
    "pyproject.toml"
    "systemd"
    "tests"
  ];
  root = toString ../.;
  topLevel =
    path: builtins.head (builtins.split "/" (builtins.substring (builtins.stringLength root + 1) (-1) path));
in
builtins.path {
  name = "intern-decision-serve-source";
  path = ../.;
  filter =
    path: _:
    builtins.elem (topLevel path) wanted && baseNameOf path != "__pycache__";
}
