package settings

import (
	"errors"
	"fmt"
	"strings"
)

// LMCacheConfig turns on LMCache's lookup messages. Both endpoints must be set, or neither.
type LMCacheConfig struct {
	WorkerEndpoint    string
	SchedulerEndpoint string
	EngineID          string
}

var lmcacheSettings = []Setting{
	{
		Key: "lmcache.worker_endpoint", Default: "",
		Unit:    "ZMQ endpoint, such as ipc:///run/x/engine_0_service_lookup_worker_lmcache_rpc_port_0",
		Meaning: "Where the sidecar binds the socket on which it receives LMCache's lookup messages. Needs lmcache.scheduler_endpoint.",
		set: checked(checkIPCEndpoint,
			func(c *Config) *string { return &c.LMCache.WorkerEndpoint }),
	},
	{
		Key: "lmcache.scheduler_endpoint", Default: "", Unit: "ZMQ endpoint",
		Meaning: "Where LMCache's scheduler side receives the answers; the sidecar connects to it. Needs lmcache.worker_endpoint.",
		set: checked(checkIPCEndpoint,
			func(c *Config) *string { return &c.LMCache.SchedulerEndpoint }),
	},
	{
		Key: "lmcache.engine_id", Default: "", Unit: "engine id",
		Meaning: "Whose pages LMCache's lookups ask for, when several engines with 8-byte hashes use the sidecar.",
		set:     text(func(c *Config) *string { return &c.LMCache.EngineID }),
	},
}

func checkIPCEndpoint(v string) error {
	if v != "" && !strings.HasPrefix(v, "ipc://") {
		return fmt.Errorf("%q does not start with ipc:// (anything else would let other machines in)", v)
	}
	return nil
}

// check refuses one endpoint without the other.
func (c *LMCacheConfig) check() error {
	if (c.WorkerEndpoint == "") != (c.SchedulerEndpoint == "") {
		return errors.New("lmcache.worker_endpoint and lmcache.scheduler_endpoint: set both or neither")
	}
	return nil
}
