package main

import (
	"errors"

	"github.com/spf13/cobra"

	"lookaside/sidecar/admin"
)

func newWhy() *cobra.Command {
	var (
		c control
		p prefix
	)
	cmd := &cobra.Command{
		Use:   "why [REQUEST | HASH …]",
		Short: "Say why a request or a prompt missed",
		Long: `Say where a prefix ends and why, with times and with what to do. Of a REQUEST, which is named as in
vLLM's log and responses (enough of its beginning), the last lookups are shown, as they ended then.
Of a prompt, tokens or hashes it is shown what is held now, in the arena and in each tier.

` + prefixHelp,
		Example: "  lookaside why cmpl-8f1c\n  lookaside why --prompt 'You are …' --vllm http://localhost:8000",
		RunE: func(cmd *cobra.Command, args []string) error {
			r := admin.WhyRequest{TimeoutRequest: seconds(p.timeout)}
			if _, _, err := admin.ParseHashes(args); len(args) == 1 && err != nil &&
				!p.prompt.given() && p.hashes == "" {
				r.Request = args[0]
			} else if !p.named(args) {
				return errors.New("name a request, or a prompt, tokens or hashes: see --help")
			} else {
				prefix, err := p.request(cmd, &c, args)
				if err != nil {
					return err
				}
				r.Space, r.Hashes = prefix.Space, prefix.Hashes
			}
			client, err := c.client(cmd)
			if err != nil {
				return err
			}
			ctx, cancel := patiently(cmd, p.timeout)
			defer cancel()
			var result admin.WhyResult
			if err := client.Post(ctx, "/v1/why", r, &result); err != nil {
				return err
			}
			return c.print(cmd, result, result.WriteTable)
		},
	}
	c.flags(cmd)
	p.flags(cmd)
	return cmd
}
