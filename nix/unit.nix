# One instance as systemd settings: `systemd.services.<name>` and, where systemd is to
# listen, `systemd.sockets.<name>`. The same settings stand as plain unit files in
# ../systemd; a test compares the two key by key.
{ lib, coreutils }:

{
  # what this instance is
  name, # the unit: `intern-decision-serve`, or `intern-decision-serve@1`
  identity, # user and cache directory: letters, digits and `-`
  label, # what follows in the description
  environmentFiles,
  cfg, # the module's options, with the instance's own on top
}:

let
  inherit (lib) concatLists mapAttrs optional optionalAttrs;

  # A percent sign begins a specifier in every setting of a unit.
  literal = text: builtins.replaceStrings [ "%" ] [ "%%" ] (toString text);

  flag = value: if value then "1" else "0";

  # Only what is set: the service has its own defaults, written once, in config.py.
  limits = lib.filterAttrs (_: value: value != null) {
    INTERN_DECISION_CHECKPOINT = cfg.checkpoint;
    INTERN_DECISION_MAX_TOKENS = cfg.maxTokens;
    INTERN_DECISION_MAX_DECISIONS = cfg.maxDecisions;
    INTERN_DECISION_MAX_BODY_BYTES = cfg.maxBodyBytes;
    INTERN_DECISION_MAX_QUEUE = cfg.maxQueue;
    INTERN_DECISION_RELEASE_SLACK_MIB = cfg.releaseSlackMib;
    INTERN_DECISION_KEEP_VISION = if cfg.keepVision == null then null else flag cfg.keepVision;
  };

  cache = "%C/${identity}";

  base = {
    VRAM_CAP_GIB = if cfg.vramCapGib == null then "" else cfg.vramCapGib;
    INTERN_DECISION_MODEL = cfg.model;
    CUDA_DEVICE_ORDER = "PCI_BUS_ID";
    CUDA_VISIBLE_DEVICES = cfg.gpu;
    USER = identity;
    LOGNAME = identity;
  }
  // optionalAttrs (!cfg.socketActivation) {
    INTERN_DECISION_HOST = cfg.host;
    INTERN_DECISION_PORT = cfg.port;
  };

  caches = {
    HOME = cache;
    XDG_CACHE_HOME = cache;
    TRITON_CACHE_DIR = "${cache}/triton";
    TORCHINDUCTOR_CACHE_DIR = "${cache}/inductor";
    CUDA_CACHE_PATH = "${cache}/cuda";
  };

  network =
    if cfg.socketActivation then
      {
        PrivateNetwork = true;
        RestrictAddressFamilies = [ "AF_UNIX" ];
        IPAddressDeny = "any";
      }
    else
      {
        RestrictAddressFamilies = [
          "AF_UNIX"
          "AF_INET"
          "AF_INET6"
        ];
        IPAddressDeny = "any";
        IPAddressAllow = cfg.clients;
      };

  listenAddress =
    let
      host = if lib.hasInfix ":" cfg.host then "[${cfg.host}]" else cfg.host;
    in
    "${host}:${toString cfg.port}";
in
{
  service = {
    description = "Intern-Decision behind semif-serve's HTTP surface${label}";
    wantedBy = [ "multi-user.target" ];
    requires = optional cfg.socketActivation "${name}.socket";
    after = concatLists [
      (optional cfg.socketActivation "${name}.socket")
      [
        "network.target"
        "systemd-modules-load.service"
        "modprobe@nvidia_uvm.service"
        "nvidia-persistenced.service"
      ]
    ];
    wants = [
      "modprobe@nvidia_uvm.service"
      "nvidia-persistenced.service"
    ];
    startLimitIntervalSec = 0;

    environment = mapAttrs (_: literal) (base // limits // cfg.environment) // caches;

    serviceConfig = {
      Type = "notify";
      NotifyAccess = "main";
      EnvironmentFile = map (file: "-${file}") environmentFiles;
      ExecStart =
        "${coreutils}/bin/env INTERN_DECISION_VRAM_CAP_GIB=\${VRAM_CAP_GIB} "
        + "${lib.getExe cfg.package} serve";
      SyslogIdentifier = "intern-decision-serve";
      LoadCredential = "api-token:${literal cfg.tokenFile}";

      CacheDirectory = identity;
      CacheDirectoryMode = "0700";

      Restart = "on-failure";
      RestartSec = 10;
      RestartPreventExitStatus = 78;
      TimeoutStartSec = 600;
      TimeoutStopSec = 90;
      WatchdogSec = 180;
      KillMode = "mixed";

      DynamicUser = true;
      User = identity;
      UMask = "0077";
      NoNewPrivileges = true;
      CapabilityBoundingSet = "";
      AmbientCapabilities = "";
      ProtectSystem = "strict";
      ProtectHome = true;
      PrivateTmp = true;
      PrivateMounts = true;
      PrivateUsers = true;
      PrivateIPC = true;
      RemoveIPC = true;
      KeyringMode = "private";
      LimitCORE = 0;
      PrivateDevices = false;
      DevicePolicy = "closed";
      DeviceAllow = "char-nvidia* rw";

      ProtectClock = true;
      ProtectControlGroups = true;
      ProtectHostname = true;
      ProtectKernelLogs = true;
      ProtectKernelModules = true;
      ProtectKernelTunables = true;
      ProtectProc = "invisible";
      ProcSubset = "all";
      LockPersonality = true;
      MemoryDenyWriteExecute = false;
      RestrictNamespaces = true;
      RestrictRealtime = true;
      RestrictSUIDSGID = true;
      SystemCallArchitectures = "native";
      SystemCallFilter = [
        "@system-service"
        "~@privileged"
      ];
      SystemCallErrorNumber = "EPERM";
    }
    // network;
  };

  socket = {
    description = "Socket of Intern-Decision behind semif-serve's HTTP surface";
    wantedBy = [ "sockets.target" ];
    listenStreams = [ listenAddress ];
    socketConfig = {
      Backlog = 128;
      NoDelay = true;
      TriggerLimitIntervalSec = 600;
      TriggerLimitBurst = 3;
      IPAddressDeny = "any";
      IPAddressAllow = cfg.clients;
    };
  };
}
