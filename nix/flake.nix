{
  description = "Intern-Decision-4B behind semif-serve's HTTP surface and the Jev wire";

  # The window of nixpkgs in which torch-bin is 2.10.0 and triton-bin 3.6.0.
  inputs.nixpkgs.url = "github:NixOS/nixpkgs/8c809a146a140c5c8806f13399592dbcb1bb5dc4";

  outputs =
    { self, nixpkgs }:
    let
      system = "x86_64-linux";
      pkgs = import nixpkgs {
        inherit system;
        config.allowUnfree = true; # CUDA; for this flake's packages alone
      };
    in
    {
      packages.${system} = rec {
        intern-decision-serve = pkgs.callPackage ./package.nix { };
        default = intern-decision-serve;
      };

      checks.${system}.package = self.packages.${system}.default;

      nixosModules.default =
        { lib, ... }:
        {
          imports = [ ./module.nix ];
          services.intern-decision-serve.package = lib.mkDefault self.packages.${system}.default;
        };
    };
}
