package admin

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// maxAnswerBytes bounds a response that a command reads.
const maxAnswerBytes = 64 << 20

// A Client sends requests to one sidecar.
type Client struct {
	name  string // for errors: the sidecar's directory or the address that was given
	url   string // scheme and host
	token string
	http  *http.Client
}

// ownURL is the URL of an admin socket.
const ownURL = "http://localhost"

// NewClient returns a client of the sidecar that owns the endpoint dir. It connects for each
// request to the admin socket, which needs no token.
func NewClient(dir string) *Client {
	return socketClient(dir, filepath.Join(dir, socketFile))
}

func socketClient(name, socket string) *Client {
	return newClient(name, ownURL, "",
		func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		})
}

func newClient(name, url, token string,
	dial func(context.Context, string, string) (net.Conn, error)) *Client {
	return &Client{name: name, url: url, token: token, http: &http.Client{
		Transport: &http.Transport{DisableKeepAlives: true, DialContext: dial},
		CheckRedirect: func(*http.Request, []*http.Request) error {
			return http.ErrUseLastResponse
		}}}
}

// ClientAt returns a client of the sidecar whose admin server is at an address: unix:///PATH,
// http://HOST:PORT or https://HOST:PORT. The token is sent to the last two only, because Unix
// sockets need none.
func ClientAt(address, token string) (*Client, error) {
	u, err := url.Parse(address)
	if err != nil {
		return nil, fmt.Errorf("%q is no address of an admin server: %w", address, err)
	}
	path := u.Path
	u.Path = ""
	switch {
	case u.RawQuery != "" || u.Fragment != "" || u.User != nil: // it would be ignored
	case u.Scheme == "unix" && u.Host == "" && filepath.IsAbs(path):
		return socketClient(address, path), nil
	case (u.Scheme == "http" || u.Scheme == "https") && u.Host != "" && strings.Trim(path, "/") == "":
		return newClient(address, u.String(), token, nil), nil
	}
	return nil, fmt.Errorf("%q is no address of an admin server: want unix:///PATH/%s, http://HOST:PORT or https://HOST:PORT",
		address, socketFile)
}

// Get fetches a path into out.
func (c *Client) Get(ctx context.Context, path string, out any) error {
	return c.do(ctx, http.MethodGet, path, nil, out)
}

// Post sends in to a path and reads the response into out.
func (c *Client) Post(ctx context.Context, path string, in, out any) error {
	b, err := json.Marshal(in)
	if err != nil {
		return err
	}
	return c.do(ctx, http.MethodPost, path, b, out)
}

func (c *Client) do(ctx context.Context, method, path string, body []byte, out any) error {
	resp, err := c.send(ctx, method, path, body)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	answer := json.NewDecoder(io.LimitReader(resp.Body, maxAnswerBytes))
	if err := answer.Decode(out); err != nil {
		return fmt.Errorf("%s: %s: %w", c.name, path, err)
	}
	return nil
}

// send sends a request and returns the response, whose body the caller must close. Any status but
// 200 is an error.
func (c *Client) send(ctx context.Context, method, path string, body []byte) (*http.Response,
	error) {
	req, err := http.NewRequestWithContext(ctx, method, c.url+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	if method == http.MethodPost {
		req.Header.Set("Content-Type", "application/json")
	}
	if c.token != "" {
		req.Header.Set("Authorization", "Bearer "+c.token)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, c.unreached(err)
	}
	if resp.StatusCode != http.StatusOK {
		defer resp.Body.Close()
		return nil, c.refused(path, resp)
	}
	return resp, nil
}

// Probe returns what a health route says: /healthz or /readyz. It fails if the sidecar does not
// respond or says no.
func (c *Client) Probe(ctx context.Context, path string) (string, error) {
	resp, err := c.send(ctx, http.MethodGet, path, nil)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswerBytes))
	return strings.TrimSpace(string(text)), err
}

// refused returns the error that a response describes.
func (c *Client) refused(path string, resp *http.Response) error {
	e := &APIError{status: resp.StatusCode}
	if json.NewDecoder(io.LimitReader(resp.Body, maxAnswerBytes)).Decode(e) != nil ||
		e.Message == "" {
		return fmt.Errorf("%s: %s: %s", c.name, path, resp.Status)
	}
	return &clientError{fmt.Sprintf("%s (%s): %s", e.Message, resp.Status, e.Fix), e}
}

// A clientError describes a cause. Its text replaces that of the cause.
type clientError struct {
	text  string
	cause error
}

func (e *clientError) Error() string { return e.text }
func (e *clientError) Unwrap() error { return e.cause }

// unreached returns why the sidecar did not respond.
func (c *Client) unreached(err error) error {
	var wrapped *url.Error
	if errors.As(err, &wrapped) {
		err = wrapped.Err // drops a URL that the user did not give
	}
	switch {
	case errors.Is(err, os.ErrNotExist):
		return &clientError{fmt.Sprintf(
			"no sidecar runs at %s (it has no %s); lookaside list shows those of this host", c.name,
			socketFile), err}
	case errors.Is(err, syscall.ECONNREFUSED) && c.url == ownURL:
		return &clientError{fmt.Sprintf(
			"no sidecar runs at %s: the last one was killed; lookaside list shows those of this host", c.name), err}
	case errors.Is(err, os.ErrPermission):
		return &clientError{fmt.Sprintf(
			"the sidecar at %s is another user's: run the command as that user or as root", c.name),
			err}
	}
	return fmt.Errorf("no sidecar answers at %s: %w", c.name, err)
}

// FetchStatus returns the status of the sidecar that owns the endpoint dir.
func FetchStatus(ctx context.Context, dir string) (Status, error) {
	var st Status
	return st, NewClient(dir).Get(ctx, "/v1/status", &st)
}
