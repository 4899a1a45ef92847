package settings

import (
	"fmt"
	"net"
	"os"
	"strings"

	"go.uber.org/zap"
)

// AdminConfig configures the admin HTTP server.
type AdminConfig struct {
	Listen    string
	Hosts     []string
	TokenFile string
	PProf     bool
}

// NoAdminListen is the value of admin.listen with which the admin server has no port.
const NoAdminListen = "none"

var adminSettings = []Setting{
	{
		Key: "admin.listen", Default: "127.0.0.1:0",
		Unit:    "host:port (port 0: any free one, written to admin.addr in runtime.dir), or none",
		Meaning: "Where the admin HTTP server listens, beside the Unix socket admin.sock in runtime.dir. With none it has no port: only the sidecar's user and root reach it, through admin.sock. An address that other machines can reach is warned about.",
		set: func(c *Config, v string) error {
			if v == NoAdminListen {
				c.Admin.Listen = v
				return nil
			}
			if _, _, err := net.SplitHostPort(v); err != nil {
				return err
			}
			c.Admin.Listen = v
			return nil
		},
	},
	{
		Key: "admin.hosts", Default: "", Unit: "NAME,…",
		Meaning: "Names, besides this machine's own, localhost and addresses, by which admin requests may name the sidecar in their Host header, such as a Kubernetes service's. Others are refused with 421, because a page in a browser could have bound its own name to the sidecar's address. Not asked of requests that carry the token of admin.token_file.",
		set: func(c *Config, v string) error {
			c.Admin.Hosts = nil
			for name := range strings.SplitSeq(v, ",") {
				if name = strings.TrimSpace(name); name == "" || strings.ContainsAny(name, ":/ ") {
					return fmt.Errorf("%q is not a name without a port", name)
				}
				c.Admin.Hosts = append(c.Admin.Hosts, name)
			}
			return nil
		},
	},
	{
		Key: "admin.token_file", Default: "", Unit: "file",
		Meaning: "A file with the token that requests to admin.listen must carry as \"Authorization: Bearer …\". Unset: none is asked for. /healthz, /readyz and admin.sock never ask for it.",
		set:     text(func(c *Config) *string { return &c.Admin.TokenFile }),
	},
	{
		Key: "admin.pprof", Default: "false", Unit: boolUnit,
		Meaning: "Serves Go's profiles under /debug/pprof/ on the admin server.",
		set:     boolean(func(c *Config) *bool { return &c.Admin.PProf }),
	},
}

// ReadToken returns the token in the file that a setting names, or "" if it names none.
func ReadToken(setting, file string, log *zap.Logger) (string, error) {
	if file == "" {
		return "", nil
	}
	b, err := os.ReadFile(file)
	if err != nil {
		return "", fmt.Errorf("%s: %w", setting, err)
	}
	token := strings.TrimSpace(string(b))
	if n := len(token); n == 0 || n > 255 {
		return "", fmt.Errorf("%s: the token in %s has %d bytes, want 1 to 255", setting, file, n)
	}
	if st, err := os.Stat(file); err == nil && st.Mode().Perm()&0o077 != 0 {
		log.Warn("other users may read a token", zap.String("setting", setting),
			zap.String("file", file), zap.String("mode", st.Mode().Perm().String()))
	}
	return token, nil
}
