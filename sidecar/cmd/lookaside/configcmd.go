package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"lookaside/internal/bytesize"
	"lookaside/internal/lmcache"
	"lookaside/sidecar/settings"
)

func newConfig() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "config",
		Short: "Make settings from another system's",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newFromLMCache())
	return cmd
}

// maxConfigText bounds the text of a file or of standard input.
const maxConfigText = 1 << 20

// newFromLMCache is one function although it has many branches: nearly all of them return the error
// of one step. The steps are in order, and each is used once.
func newFromLMCache() *cobra.Command {
	var (
		asJSON, env bool
		adapters    []string
		capacity    string
	)
	cmd := &cobra.Command{
		Use:   "from-lmcache [FILE | JSON | -] [-- lmcache server FLAG …]",
		Short: "Turn LMCache's configuration into Lookaside's, and list what has no equivalent",
		Long: `Turn LMCache's configuration into Lookaside's, and list what has no equivalent.

Read are LMCache's YAML or JSON file (or standard input, "-"), its LMCACHE_* variables in this
command's environment (--env; they override the file, and LMCACHE_CONFIG_FILE names it if no
FILE is given), the L2 adapters of its server (--l2-adapter, as often as there are any), and the
server's command line, after "--". In place of FILE there may be JSON itself: a configuration,
an adapter or a list of them, or the value of vLLM's --kv-transfer-config.

The settings go to standard output, as YAML with comments; what has no equivalent, or is not
quite the same, to standard error as a table. Secrets are not repeated: the table says where
they belong.`,
		Example: `  lookaside config from-lmcache lmcache.yaml > lookaside.yaml
  LMCACHE_LOCAL_DISK=file:///mnt/kv/ lookaside config from-lmcache --env lmcache.yaml
  lookaside config from-lmcache '{"type": "dax", "device_path": "/dev/dax0.0", "max_dax_size_gb": 100, "slot_bytes": 268435456}'
  lookaside config from-lmcache -- lmcache server --l1-size-gb 80 --eviction-policy LRU --l2-adapter '{"type": "fs", "base_path": "/mnt/kv"}'`,
		RunE: func(cmd *cobra.Command, args []string) error {
			src := lmcache.Source{Adapters: adapters}
			if n := cmd.ArgsLenAtDash(); n >= 0 {
				args, src.Server = args[:n], args[n:]
			}
			if len(args) > 1 {
				return fmt.Errorf("one FILE at a time: %q is one too many (the command line of LMCache's server goes after --)", args[1])
			}
			var err error
			if src.DiskCapacityBytes, err = bytesize.Parse(capacity); err != nil ||
				src.DiskCapacityBytes <= 0 {
				return fmt.Errorf("--disk-capacity: %q is not a size such as 200G", capacity)
			}
			file := os.Getenv("LMCACHE_CONFIG_FILE")
			if !env {
				file = ""
			} else {
				src.Environ = os.Environ()
			}
			if len(args) == 1 {
				file = args[0]
			}
			if err := readSource(cmd.InOrStdin(), file, &src); err != nil {
				return err
			}
			if src.Dir, err = os.Getwd(); err != nil {
				return err
			}
			if src.Home, err = os.UserHomeDir(); err != nil {
				src.Home = "" // a path with ~ is an error then
			}
			result, err := lmcache.Convert(src)
			if err != nil {
				return err
			}
			if asJSON {
				err = printJSON(cmd.OutOrStdout(), result)
			} else {
				_, err = io.WriteString(cmd.OutOrStdout(), result.YAML)
				err = errors.Join(err, result.WriteTable(cmd.ErrOrStderr()))
			}
			if err != nil {
				return err
			}
			if _, err := settings.Parse("these settings", []byte(result.YAML), nil); err != nil {
				return fmt.Errorf("a sidecar refuses the converted settings: change them by hand: %w", err)
			}
			return nil
		},
	}
	f := cmd.Flags()
	f.BoolVar(&asJSON, "json", false,
		"print JSON: the settings, what belongs into vLLM, and what became of each key")
	f.BoolVar(&env, "env", false, "read the LMCACHE_* variables of the environment too")
	f.StringArrayVar(&adapters, "l2-adapter", nil,
		"an L2 adapter of LMCache's server, as `JSON`; may be repeated")
	f.StringVar(&capacity, "disk-capacity", "64G",
		"`size` of a disk tier in a directory that LMCache filled without a limit")
	return cmd
}

// readSource reads the source that file names: a file, standard input, or the text itself.
func readSource(stdin io.Reader, file string, src *lmcache.Source) error {
	if t := strings.TrimSpace(file); t == "" {
		return nil
	} else if t[0] == '{' || t[0] == '[' {
		src.Text = []byte(t)
		return nil
	}
	r := stdin
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return err
		}
		defer f.Close()
		r, src.Name = f, file
	}
	var err error
	// the parser refuses longer texts
	src.Text, err = io.ReadAll(io.LimitReader(r, maxConfigText+1))
	return err
}
