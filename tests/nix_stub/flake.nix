{
  description = "What stands in for nixpkgs where nixpkgs cannot be had";
  outputs = _: { lib = import ./lib.nix; };
}
