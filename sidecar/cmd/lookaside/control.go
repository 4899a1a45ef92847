package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"lookaside/sidecar/admin"
	"lookaside/sidecar/settings"
)

// A control is shared by the commands that ask a sidecar's admin server.
type control struct {
	asJSON    bool
	address   string // of the admin server; "" for the socket in runtime.dir
	tokenFile string
	cfg       settings.Config
}

// flags adds the flags that all these commands have to cmd.
func (c *control) flags(cmd *cobra.Command) {
	c.localFlags(cmd)
	f := cmd.Flags()
	f.StringVar(&c.address, "admin", "",
		"`address` of the sidecar's admin server, instead of --runtime-dir: unix:///PATH/admin.sock, http://HOST:PORT or https://HOST:PORT")
	f.StringVar(&c.tokenFile, "token-file", "",
		"`file` with the token that an admin server at http:// or https:// demands; default: admin.token_file of the settings")
	cmd.MarkFlagsMutuallyExclusive("admin", "runtime-dir")
}

// localFlags adds the flags of a command that needs more of a sidecar than its admin server.
func (c *control) localFlags(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&c.asJSON, "json", false, "print JSON")
	settings.AddFlags(cmd.Flags(), "runtime.dir")
}

// load finds which sidecar the flags and the environment name.
func (c *control) load(cmd *cobra.Command) (err error) {
	c.cfg, err = settings.Load(cmd.Flags(), os.Environ())
	return err
}

// client returns a client of the sidecar that the flags and the environment name.
func (c *control) client(cmd *cobra.Command) (*admin.Client, error) {
	if err := c.load(cmd); err != nil {
		return nil, err
	}
	if c.address == "" {
		if c.tokenFile != "" {
			return nil, errors.New("--token-file is of use with --admin only: admin.sock needs no token")
		}
		return admin.NewClient(c.cfg.Runtime.Dir), nil
	}
	setting, file := "--token-file", c.tokenFile
	if file == "" {
		setting, file = "admin.token_file", c.cfg.Admin.TokenFile
	}
	if strings.HasPrefix(c.address, "unix:") {
		file = "" // such a socket needs none, and its user may not read the server's
	}
	token, err := settings.ReadToken(setting, file, zap.NewNop())
	if err != nil {
		return nil, err
	}
	return admin.ClientAt(c.address, token)
}

// hostStates returns the sidecars of the host: of this one, or of that of --admin.
func (c *control) hostStates(cmd *cobra.Command) (func(context.Context) ([]admin.HostState, error),
	error) {
	client, err := c.client(cmd)
	if err != nil {
		return nil, err
	}
	if c.address != "" {
		return client.HostStates, nil
	}
	dir := filepath.Dir(c.cfg.Runtime.Dir)
	return func(ctx context.Context) ([]admin.HostState, error) {
		return admin.HostStates(ctx, dir)
	}, nil
}

// print prints the response as JSON, or calls table.
func (c *control) print(cmd *cobra.Command, answer any, table func(io.Writer) error) error {
	if c.asJSON {
		return printJSON(cmd.OutOrStdout(), answer)
	}
	return table(cmd.OutOrStdout())
}

// A prefix holds the flags of a command on a prefix.
type prefix struct {
	prompt
	space   string
	hashes  string // a file
	timeout time.Duration
}

func (p *prefix) flags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&p.space, "space", "",
		"`fingerprint` of the space, or its beginning; may be left out while only one is open")
	f.StringVar(&p.hashes, "hashes", "", "`file` with page hashes")
	p.prompt.flags(cmd)
	timeoutFlag(cmd, &p.timeout)
}

func timeoutFlag(cmd *cobra.Command, timeout *time.Duration) {
	cmd.Flags().DurationVar(timeout, "timeout", time.Minute,
		"how long it may take; what was done until then stays")
}

// named reports whether the flags and arguments name a prefix.
func (p *prefix) named(args []string) bool {
	return p.prompt.given() || p.hashes != "" || len(args) > 0
}

// request returns the request for the prefix that the flags and arguments name.
func (p *prefix) request(cmd *cobra.Command, c *control, args []string) (admin.PrefixRequest,
	error) {
	r := admin.PrefixRequest{Space: p.space, Hashes: args}
	if p.prompt.given() {
		if len(args) > 0 {
			return r, errTwoPrefixes
		}
		client, err := c.client(cmd)
		if err != nil {
			return r, err
		}
		st, err := statusOf(cmd.Context(), client)
		if err != nil {
			return r, err
		}
		space, err := chooseSpace(st.Spaces, p.space)
		if err != nil {
			return r, err
		}
		r.Space = space.Fingerprint
		r.Hashes, err = p.names(cmd, space)
		return r, err
	}
	if p.hashes != "" {
		more, err := readWords(p.hashes, cmd.InOrStdin())
		if err != nil {
			return r, err
		}
		r.Hashes = append(r.Hashes, more...)
	}
	_, _, err := admin.ParseHashes(r.Hashes)
	return r, err
}

// seconds returns a timeout in the form of requests.
func seconds(timeout time.Duration) admin.TimeoutRequest {
	return admin.TimeoutRequest{TimeoutS: timeout.Seconds()}
}

// patiently bounds a request by the sidecar's own timeout, plus some time for the transfer.
func patiently(cmd *cobra.Command, timeout time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(cmd.Context(), timeout+10*time.Second)
}

func showProgress(w io.Writer, what string, p admin.ProgressResult) error {
	_, err := fmt.Fprintf(w, "%s: %d of %d pages, in %s%s\n", what, p.Pages, p.PagesAsked,
		took(p.Seconds), unless(p.Complete, "; the time ran out"))
	return err
}

func took(seconds float64) time.Duration {
	return time.Duration(seconds * float64(time.Second)).Round(10 * time.Microsecond)
}

func unless(ok bool, text string) string {
	if ok {
		return ""
	}
	return text
}

func newTiers() *cobra.Command {
	var c control
	cmd := &cobra.Command{
		Use:   "tiers",
		Short: "Show the tiers of a running sidecar: state, use, traffic",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			client, err := c.client(cmd)
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), 5*time.Second)
			defer cancel()
			var answer admin.TiersResult
			if err := client.Get(ctx, "/v1/tiers", &answer); err != nil {
				return err
			}
			return c.print(cmd, answer, answer.WriteTable)
		},
	}
	c.flags(cmd)
	return cmd
}

func newPrefetch() *cobra.Command {
	var (
		c control
		p prefix
	)
	cmd := &cobra.Command{
		Use:   "prefetch [HASH …]",
		Short: "Bring a prefix from the tiers into the arena",
		Long: `Bring a prefix from the tiers into the arena, so that the next lookup finds it there.

` + prefixHelp,
		Example: "  lookaside prefetch --prompt 'You are …' --vllm http://localhost:8000\n  lookaside prefetch --space 3f9a --timeout 5m --hashes -",
		RunE: func(cmd *cobra.Command, args []string) error {
			return c.post(cmd, &p, args, func(r admin.PrefixRequest) (string, any) {
				return "/v1/prefetch", admin.PrefetchRequest{PrefixRequest: r,
					TimeoutRequest: seconds(p.timeout)}
			}, "in the arena")
		},
	}
	p.flags(cmd)
	c.flags(cmd)
	return cmd
}

// post sends a request for the prefix, and shows how far the sidecar got.
func (c *control) post(cmd *cobra.Command, p *prefix, args []string,
	request func(admin.PrefixRequest) (path string, in any), what string) error {
	r, err := p.request(cmd, c, args)
	if err != nil {
		return err
	}
	client, err := c.client(cmd)
	if err != nil {
		return err
	}
	ctx, cancel := patiently(cmd, p.timeout)
	defer cancel()
	path, in := request(r)
	var answer admin.ProgressResult
	if err := client.Post(ctx, path, in, &answer); err != nil {
		return err
	}
	return c.print(cmd, answer, func(w io.Writer) error { return showProgress(w, what, answer) })
}

func newMove() *cobra.Command {
	var (
		c        control
		p        prefix
		from, to string
		keep     bool
	)
	cmd := &cobra.Command{
		Use:   "move --from TIER --to TIER [HASH …]",
		Short: "Move or copy a prefix from one tier to another",
		Long: `Move a prefix from one tier to another, or copy it (--keep). Tiers are named as lookaside tiers
shows them.

` + prefixHelp,
		Example: "  lookaside move --from disk --to s3 --keep --prompt 'You are …' --vllm http://localhost:8000",
		RunE: func(cmd *cobra.Command, args []string) error {
			return c.post(cmd, &p, args, func(r admin.PrefixRequest) (string, any) {
				return "/v1/move", admin.MoveRequest{PrefixRequest: r,
					TimeoutRequest: seconds(p.timeout), From: from, To: to, Keep: keep}
			}, "in "+to)
		},
	}
	f := cmd.Flags()
	f.StringVar(&from, "from", "", "`tier` that has the prefix (required)")
	f.StringVar(&to, "to", "", "`tier` that is to have it (required)")
	f.BoolVar(&keep, "keep", false, "copy: leave it where it was as well")
	p.flags(cmd)
	c.flags(cmd)
	_ = cmd.MarkFlagRequired("from")
	_ = cmd.MarkFlagRequired("to")
	return cmd
}

func newPin() *cobra.Command {
	var (
		c        control
		p        prefix
		list     bool
		prefetch bool
		label    string
	)
	cmd := &cobra.Command{
		Use:   "pin [HASH …]",
		Short: "Keep a prefix in the arena, or list what is kept",
		Long: `Keep what the arena has of a prefix from being evicted, until it is unpinned or cleared, or the
sidecar ends. All pins together may hold the share of one session (sessions.share). With --list:
list the pins.

` + prefixHelp,
		Example: "  lookaside pin --label 'system prompt' --prefetch --prompt 'You are …' --vllm http://localhost:8000\n  lookaside pin --list",
		RunE: func(cmd *cobra.Command, args []string) error {
			if list {
				return c.listPins(cmd)
			}
			r, err := p.request(cmd, &c, args)
			if err != nil {
				return err
			}
			client, err := c.client(cmd)
			if err != nil {
				return err
			}
			ctx, cancel := patiently(cmd, p.timeout)
			defer cancel()
			var pin admin.PinStatus
			if err := client.Post(ctx, "/v1/pin", admin.PinRequest{PrefixRequest: r,
				TimeoutRequest: seconds(p.timeout), Prefetch: prefetch, Label: label},
				&pin); err != nil {
				return err
			}
			return c.print(cmd, pin, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "pinned: %d of %d pages; unpin with: lookaside unpin %s\n",
					pin.Pages, pin.PagesAsked, pin.Pin)
				return err
			})
		},
	}
	f := cmd.Flags()
	f.BoolVar(&list, "list", false, "list the pins")
	f.BoolVar(&prefetch, "prefetch", false, "bring what the tiers have into the arena first")
	f.StringVar(&label, "label", "", "what the pin is for; shown in the list")
	p.flags(cmd)
	c.flags(cmd)
	cmd.MarkFlagsMutuallyExclusive("list", "hashes")
	return cmd
}

func (c *control) listPins(cmd *cobra.Command) error {
	client, err := c.client(cmd)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), 5*time.Second)
	defer cancel()
	var answer admin.PinsResult
	if err := client.Get(ctx, "/v1/pins", &answer); err != nil {
		return err
	}
	return c.print(cmd, answer, func(w io.Writer) error {
		tw := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
		fmt.Fprintln(tw, "PIN\tPAGES\tSPACE\tSINCE\tLABEL")
		for _, p := range answer.Pins {
			fmt.Fprintf(tw, "%s\t%d\t%.12s\t%s\t%s\n", p.Pin, p.Pages, p.Space,
				p.Since.Format(time.DateTime), p.Label)
		}
		return tw.Flush()
	})
}

func newUnpin() *cobra.Command {
	var (
		c   control
		all bool
	)
	cmd := &cobra.Command{
		Use:   "unpin {PIN … | --all}",
		Short: "Let what was pinned be evicted again",
		Long:  "Let what was pinned be evicted again. Pins are named by their ids, which lookaside pin --list shows.",
		RunE: func(cmd *cobra.Command, args []string) error {
			if all == (len(args) > 0) {
				return errors.New("unpin what? Give the ids of pins (lookaside pin --list shows them), or --all")
			}
			client, err := c.client(cmd)
			if err != nil {
				return err
			}
			requests := []admin.UnpinRequest{{All: true}}
			if !all {
				requests = nil
				for _, id := range args {
					requests = append(requests, admin.UnpinRequest{Pin: id})
				}
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), 10*time.Second)
			defer cancel()
			var sum admin.UnpinResult
			for _, r := range requests {
				var answer admin.UnpinResult
				if err := client.Post(ctx, "/v1/unpin", r, &answer); err != nil {
					return err
				}
				sum.Unpinned += answer.Unpinned
			}
			return c.print(cmd, sum, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "unpinned: %d\n", sum.Unpinned)
				return err
			})
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "all pins")
	c.flags(cmd)
	return cmd
}

// newClear is one function although it has many branches: each is for one form of what to clear (a
// prompt, a space, all) or of the output. All of them use the flags, which are its variables.
func newClear() *cobra.Command {
	var (
		c        control
		p        prefix
		all, yes bool
		of       string
		first    int
	)
	cmd := &cobra.Command{
		Use:   "clear {--all | --space FINGERPRINT | a prefix} [--tier TIER] --yes",
		Short: "Forget what is held: of a prompt, of a space or of all, in one tier or everywhere",
		Long: `Forget what is held: of a prompt, of one space or of all; in the arena and every tier, or in one
of them (--tier; the arena is called arena). In a tier that several sidecars share, such as
Redis, it is gone for all of them. Pins of a space that is cleared from the arena end.

Of a prompt, its pages are forgotten, and what continues them is not found any more. So prompts
that begin alike lose their common beginning: --first-page leaves the pages before one. What is
pinned of it stays in memory, where nothing finds it, until it is unpinned.

Nothing is cleared without --yes.

` + prefixHelp,
		Example: "  lookaside clear --all --yes\n  lookaside clear --space 3f9a --tier disk --yes\n  lookaside clear --prompt 'You are …' --vllm http://localhost:8000 --yes",
		RunE: func(cmd *cobra.Command, args []string) error {
			named := p.named(args)
			if all && (named || p.space != "") || !all && !named && p.space == "" {
				return errors.New("clear what? Give --prompt or --tokens, or --space with a fingerprint (lookaside status shows them), or --all")
			}
			if !yes {
				what, where := "everything", "the arena and every tier"
				switch {
				case named:
					what = "the prefix"
				case !all:
					what = "what space " + p.space + " has"
				}
				if of != "" {
					where = of
				}
				return fmt.Errorf("this would forget %s in %s: give --yes to do it", what,
					where)
			}
			client, err := c.client(cmd)
			if err != nil {
				return err
			}
			r := admin.ClearRequest{TimeoutRequest: seconds(p.timeout), Space: p.space, All: all,
				Tier: of, FirstPage: first}
			if named {
				of, err := p.request(cmd, &c, args)
				if err != nil {
					return err
				}
				r.Space, r.Hashes = of.Space, of.Hashes
			}
			ctx, cancel := patiently(cmd, p.timeout)
			defer cancel()
			var answer admin.ClearResult
			if err := client.Post(ctx, "/v1/clear", r, &answer); err != nil {
				return err
			}
			err = c.print(cmd, answer, func(w io.Writer) error {
				for _, t := range answer.Cleared {
					switch {
					case t.Error != "":
						fmt.Fprintf(w, "%s: not cleared: %s\n", t.Tier, t.Error)
					case t.Chunks < 0:
						fmt.Fprintf(w, "%s: cleared\n", t.Tier)
					default:
						fmt.Fprintf(w, "%s: %d chunks\n", t.Tier, t.Chunks)
					}
				}
				if answer.Pins > 0 {
					fmt.Fprintf(w, "pins ended: %d\n", answer.Pins)
				}
				return nil
			})
			if err == nil && !answer.Complete {
				err = errors.New("not all was cleared")
			}
			return err
		},
	}
	f := cmd.Flags()
	f.BoolVar(&all, "all", false, "all spaces, also those that no worker uses now")
	f.IntVar(&first, "first-page", 0,
		"of a prefix, the first `page` that is forgotten, counted from 0")
	f.StringVar(&of, "tier", "", "only this `tier`; arena is the arena")
	f.BoolVar(&yes, "yes", false, "do it")
	p.flags(cmd)
	c.flags(cmd)
	return cmd
}
