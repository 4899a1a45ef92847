package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"lookaside/sidecar/admin"
	"lookaside/sidecar/vllm"
)

// prefixHelp is the part of the help that all commands on a prefix share.
const prefixHelp = `The prefix is a prompt, its token ids, or page hashes:
  --prompt TEXT --vllm URL       the text of a completion request, of which the vLLM server at URL makes tokens
  --prompt-file FILE --vllm URL  the same, from a file, every byte of it
  --messages FILE --vllm URL     the messages of a chat request, as a JSON list
  --tokens FILE                  token ids: a JSON list, or numbers separated by white space or commas
  --hashes FILE, HASH …          page hashes in hexadecimal, separated by white space, from the first page on
A FILE of "-" is standard input. Prompts and tokens are named as the engine that declared the
space names them; give --cache-salt where the request had one. Requests with an adapter, images
or embeddings cannot be named here: their pages' names depend on data that only their vLLM has.
The key of the server's API is read from VLLM_API_KEY.`

// A prompt holds the flags of a command that takes a prompt or its tokens instead of page hashes.
type prompt struct {
	text, file, messages, tokens string
	url, model, salt             string
}

func (p *prompt) flags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&p.text, "prompt", "",
		"`text` of a prompt, as a completion request has it; wants --vllm")
	f.StringVar(&p.file, "prompt-file", "", "`file` with the text of a prompt; wants --vllm")
	f.StringVar(&p.messages, "messages", "",
		"`file` with the messages of a chat, as a chat request has them; wants --vllm")
	f.StringVar(&p.tokens, "tokens", "", "`file` with a prompt's token ids")
	f.StringVar(&p.url, "vllm", "",
		"`URL` of a vLLM server with that model, whose /tokenize is asked")
	f.StringVar(&p.model, "model", "",
		"`name` of the model, as that server calls it; may be left out")
	f.StringVar(&p.salt, "cache-salt", "", "the request's cache_`salt`")
	cmd.MarkFlagsMutuallyExclusive("prompt", "prompt-file", "messages", "tokens", "hashes")
}

// given reports whether there is a prompt or tokens.
func (p *prompt) given() bool {
	return p.text != "" || p.file != "" || p.messages != "" || p.tokens != ""
}

// read returns the prompt's tokens.
func (p *prompt) read(cmd *cobra.Command) ([]uint32, error) {
	if p.tokens != "" {
		if p.url != "" {
			return nil, errors.New("--vllm makes tokens of --prompt or --messages, and there are --tokens already: leave one out")
		}
		b, err := readInput(p.tokens, cmd.InOrStdin())
		if err != nil {
			return nil, err
		}
		return vllm.ParseTokens(string(b))
	}
	if p.url == "" {
		return nil, errors.New("a prompt's tokens depend on its model: give --vllm with the URL of a server that has the model, or --tokens")
	}
	t := vllm.Text{Model: p.model, Prompt: p.text}
	if p.file != "" {
		b, err := readInput(p.file, cmd.InOrStdin())
		if err != nil {
			return nil, err
		}
		t.Prompt = string(b)
	}
	if p.messages != "" {
		b, err := readInput(p.messages, cmd.InOrStdin())
		if err != nil {
			return nil, err
		}
		if t.Messages = json.RawMessage(b); !json.Valid(b) {
			return nil, fmt.Errorf("--messages: %s is not JSON", p.messages)
		}
	}
	server := vllm.Server{URL: p.url, Key: os.Getenv("VLLM_API_KEY")}
	return server.Tokenize(cmd.Context(), t)
}

// names returns the hashes of the prompt's pages in a space.
func (p *prompt) names(cmd *cobra.Command, space *admin.SpaceStatus) ([]string, error) {
	scheme, err := vllm.SchemeOf(space.Fields, space.PageTokens)
	if err != nil {
		return nil, err
	}
	tokens, err := p.read(cmd)
	if err != nil {
		return nil, err
	}
	return scheme.Pages(tokens, p.salt)
}

// chooseSpace returns the sidecar's space whose fingerprint begins with name.
func chooseSpace(spaces []admin.SpaceStatus, name string) (*admin.SpaceStatus, error) {
	var found []*admin.SpaceStatus
	var all []string
	for i := range spaces {
		s := &spaces[i]
		all = append(all, fmt.Sprintf("%.12s (%s, %s, rank %s of %s)", s.Fingerprint,
			s.Fields["model"], s.Fields["dtype"], s.Fields["tp_shard"], s.Fields["tp"]))
		if strings.HasPrefix(s.Fingerprint, strings.ToLower(name)) {
			found = append(found, s)
		}
	}
	switch {
	case len(spaces) == 0:
		return nil, errors.New("no space is open: let a worker connect first, which declares how its pages are named")
	case len(found) == 1:
		return found[0], nil
	}
	return nil, fmt.Errorf("choose one with --space: %s", strings.Join(all, "; "))
}

// asked returns the names of a lookup's pages, and sets the lookup's engine.
func (p *prompt) asked(cmd *cobra.Command, c *control, q *admin.Query,
	args []string) ([]string, error) {
	if len(args) > 0 {
		return nil, errTwoPrefixes
	}
	space, err := chooseEngine(cmd, c, q)
	if err != nil {
		return nil, err
	}
	names, err := p.names(cmd, space)
	if err == nil && int(q.FirstPage) >= len(names) {
		err = fmt.Errorf("--first-page is %d, and the prompt has %d whole pages", q.FirstPage,
			len(names))
	}
	if err != nil {
		return nil, err
	}
	return names[q.FirstPage:], nil
}

var errTwoPrefixes = errors.New("give a prompt, tokens, or page hashes, only one of them")

// chooseEngine sets a lookup's engine to one with a connected worker of its rank, and returns the
// space of that engine. All engines of a space find the same pages.
func chooseEngine(cmd *cobra.Command, c *control, q *admin.Query) (*admin.SpaceStatus, error) {
	client, err := c.client(cmd)
	if err != nil {
		return nil, err
	}
	st, err := statusOf(cmd.Context(), client)
	if err != nil {
		return nil, err
	}
	var engines, spaces []string
	for _, s := range st.Sessions {
		if s.Role == "worker" && s.Rank == q.Rank && (q.EngineID == "" ||
			s.EngineID == q.EngineID) {
			engines = append(engines, s.EngineID)
			spaces = append(spaces, s.Space)
		}
	}
	if len(engines) == 0 {
		return nil, fmt.Errorf("no worker of rank %d is connected%s: a worker is needed to choose the space", q.Rank, ofEngine(q.EngineID))
	}
	if distinct := slices.Compact(slices.Sorted(slices.Values(spaces))); len(distinct) > 1 {
		return nil, fmt.Errorf("workers of several spaces are connected: choose one with --engine-id, of %s", strings.Join(engines, ", "))
	}
	q.EngineID = engines[0]
	return chooseSpace(st.Spaces, spaces[0])
}

func ofEngine(engine string) string {
	if engine == "" {
		return ""
	}
	return " of engine " + engine
}

// statusOf returns the sidecar's status.
func statusOf(ctx context.Context, client *admin.Client) (*admin.Status, error) {
	var st admin.Status
	if err := client.Get(ctx, "/v1/status", &st); err != nil {
		return nil, err
	}
	return &st, nil
}
