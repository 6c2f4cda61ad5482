# The module under the user's settings, given as a JSON object: what `nixos-rebuild` would
# be asked for. Lists, strings, numbers and booleans, so that --json can print it.
{ settings }:

let
  pkgs = import ./. { };
  own = builtins.fromJSON settings;
in
pkgs.lib.evalModule {
  module = import ../../nix/module.nix;
  inherit pkgs;
  settings.services.intern-decision-serve = {
    package = {
      outPath = "/package";
      meta.mainProgram = "intern-decision-serve";
    };
  }
  // own;
}
