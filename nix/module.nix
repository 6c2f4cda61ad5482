# `services.intern-decision-serve`: one locked-down process per GPU. The flake sets
# `package`; everything a unit file would say is in ./unit.nix.
{
  config,
  lib,
  pkgs,
  ...
}:

let
  inherit (lib)
    mkEnableOption
    mkIf
    mkOption
    types
    ;

  cfg = config.services.intern-decision-serve;
  directory = "/etc/intern-decision-serve";
  base = "intern-decision-serve";
  absolutePath = types.strMatching "/.*";

  orDefault =
    type: description:
    mkOption {
      type = types.nullOr type;
      default = null;
      description = "${description} Null leaves the service's own default.";
    };

  portOption = {
    type = types.port;
    description = "TCP port to listen on.";
  };

  vramCapGib = {
    type = types.nullOr types.numbers.positive;
    default = null;
    description = ''
      Cap of the CUDA allocator, in GiB; null means uncapped. The CUDA context and the
      libraries' workspaces lie outside it. `VRAM_CAP_GIB` in the environment file wins.
    '';
  };

  environment = mkOption {
    type = types.attrsOf types.str;
    default = { };
    description = "Further environment variables. Never the token: use tokenFile.";
  };

  instance =
    { name, ... }:
    {
      options = {
        port = mkOption portOption;
        gpu = mkOption {
          type = types.str;
          default = name;
          description = "The GPU, as CUDA_VISIBLE_DEVICES; the instance's name if unset.";
        };
        vramCapGib = mkOption (vramCapGib // { default = cfg.vramCapGib; });
        inherit environment;
      };
    };

  makeUnit = import ./unit.nix {
    inherit lib;
    inherit (pkgs) coreutils;
  };

  plain = makeUnit {
    inherit cfg;
    name = base;
    identity = base;
    label = if cfg.socketActivation then ", no network" else "";
    environmentFiles = [ "${directory}/.env" ];
  };

  makeInstance =
    name: own:
    lib.nameValuePair "${base}@${name}" (makeUnit {
      name = "${base}@${name}";
      identity = "${base}-${name}";
      label = ", GPU ${own.gpu}" + (if cfg.socketActivation then ", no network" else "");
      environmentFiles = [
        "${directory}/.env"
        "${directory}/${name}.env"
      ];
      cfg = cfg // own // { environment = cfg.environment // own.environment; };
    });

  units =
    if cfg.instances == { } then
      { ${base} = plain; }
    else
      lib.mapAttrs' makeInstance cfg.instances;

  ports =
    if cfg.instances == { } then
      [ cfg.port ]
    else
      lib.mapAttrsToList (_: own: own.port) cfg.instances;

  environments =
    [ cfg.environment ] ++ lib.mapAttrsToList (_: own: own.environment) cfg.instances;

  names = builtins.attrNames cfg.instances;
in
{
  options.services.intern-decision-serve = {
    enable = mkEnableOption "Intern-Decision behind semif-serve's HTTP surface";

    package = mkOption {
      type = types.package;
      description = "The service with its closure; the flake's module sets it.";
    };

    model = mkOption {
      type = types.enum [
        "Intern-Decision-4B"
        "Intern-Decision-2B"
        "Intern-Decision-0.8B"
      ];
      default = "Intern-Decision-4B";
      description = "Which of the pinned family to serve.";
    };

    checkpoint = orDefault absolutePath "The snapshot's directory.";

    host = mkOption {
      type = types.strMatching "[0-9a-zA-Z.:-]+";
      default = "127.0.0.1";
      description = "Address to listen on. Others than this host also need `clients`.";
    };

    port = mkOption (portOption // { default = 8100; });

    tokenFile = mkOption {
      type = absolutePath;
      default = "${directory}/api-token";
      description = ''
        File with the bearer token, read by systemd as root and passed as a credential.
        A string, so that no copy goes to the world-readable store.
      '';
    };

    vramCapGib = mkOption vramCapGib;

    inherit environment;

    maxTokens = orDefault types.ints.positive "Tokens a whole call may have.";
    maxDecisions = orDefault types.ints.positive "Orderings scored per request.";
    maxBodyBytes = orDefault types.ints.positive "Bytes of a body, as sent and decoded.";
    maxQueue = orDefault types.ints.positive "POSTs queued or scoring at once.";
    releaseSlackMib = orDefault types.ints.unsigned "Reserved MiB over the baseline kept.";
    keepVision = orDefault types.bool "Whether the vision tower stays loaded.";

    gpu = mkOption {
      type = types.str;
      default = "0";
      description = "The GPU, as CUDA_VISIBLE_DEVICES counts them in PCI bus order.";
    };

    clients = mkOption {
      type = types.listOf types.str;
      default = [ "localhost" ];
      example = [
        "localhost"
        "10.0.0.0/8"
      ];
      description = "Addresses the kernel lets through, in either direction.";
    };

    openFirewall = mkOption {
      type = types.bool;
      default = false;
      description = "Whether to open the ports in the firewall.";
    };

    socketActivation = mkOption {
      type = types.bool;
      default = false;
      description = "Whether systemd listens and the service has no network at all.";
    };

    instances = mkOption {
      type = types.attrsOf (types.submodule instance);
      default = { };
      example = {
        "0".port = 8100;
        "1".port = 8101;
      };
      description = ''
        Several processes, one per GPU, instead of the one. Named after their GPU, or
        freely with `gpu` set. Everything not set here is as above.
      '';
    };
  };

  config = mkIf cfg.enable {
    assertions = [
      {
        assertion = !(lib.hasPrefix builtins.storeDir cfg.tokenFile);
        message = "intern-decision-serve: tokenFile lies in the store, which all can read";
      }
      {
        assertion = builtins.all (set: !(set ? INTERN_DECISION_API_TOKEN)) environments;
        message = "intern-decision-serve: every user can read environment; use tokenFile";
      }
      {
        assertion = lib.unique ports == ports;
        message = "intern-decision-serve: two instances share a port";
      }
      {
        assertion = builtins.all (name: builtins.match "[a-z0-9-]{1,9}" name != null) names;
        message = "intern-decision-serve: an instance's name is 1 to 9 of a-z, 0-9 and -";
      }
      {
        assertion = cfg.openFirewall -> cfg.clients != [ "localhost" ];
        message = "intern-decision-serve: openFirewall is in vain while clients is localhost";
      }
    ];

    systemd.services = lib.mapAttrs (_: unit: unit.service) units;
    systemd.sockets = mkIf cfg.socketActivation (lib.mapAttrs (_: unit: unit.socket) units);
    networking.firewall.allowedTCPPorts = mkIf cfg.openFirewall ports;
  };
}
