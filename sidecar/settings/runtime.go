package settings

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// RuntimeConfig configures the directory of the sidecar's sockets.
type RuntimeConfig struct {
	Dir string // the endpoint: an absolute path of a directory that the sidecar owns
}

var runtimeSettings = []Setting{
	{
		Key: "runtime.dir", Default: "${XDG_RUNTIME_DIR:-/tmp}/lookaside-$UID/rank-0",
		Unit: "directory", derived: true,
		Meaning: "The endpoint: where the sidecar makes its sockets. Owned by it alone: made with mode 0700, refused if another user owns it, others may enter it, or it is a symbolic link.",
		set:     text(func(c *Config) *string { return &c.Runtime.Dir }),
	},
}

// DefaultDir returns the endpoint that a sidecar uses, and a client looks for, if none is named.
func DefaultDir(environ []string) string {
	base := "/tmp"
	for _, e := range environ {
		if v, ok := strings.CutPrefix(e, "XDG_RUNTIME_DIR="); ok && v != "" {
			base = v
		}
	}
	return filepath.Join(base, "lookaside-"+strconv.Itoa(os.Getuid()), "rank-0")
}

// complete sets the default directory.
func (c *RuntimeConfig) complete(environ []string) error {
	if c.Dir == "" {
		c.Dir = DefaultDir(environ)
	}
	if !filepath.IsAbs(c.Dir) {
		return fmt.Errorf("runtime.dir: %q is not an absolute path", c.Dir)
	}
	c.Dir = filepath.Clean(c.Dir)
	return nil
}
