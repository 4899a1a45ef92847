package admin

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	"lookaside/sidecar/settings"
	"lookaside/tiers"
	"lookaside/tiers/stack"
)

// APIError is the response to an admin request that fails.
type APIError struct {
	status  int
	Message string `json:"error" doc:"What is wrong."`
	Fix     string `json:"fix" doc:"What to do about it."`
}

// Error implements error.
func (e *APIError) Error() string { return e.Message }

// GetStatus implements huma.StatusError.
func (e *APIError) GetStatus() int { return e.status }

func apiError(status int, fix, format string, args ...any) *APIError {
	return &APIError{status: status, Message: fmt.Sprintf(format, args...), Fix: fix}
}

// seeDocument is the fix for a wrong request.
const seeDocument = "GET /openapi.json says what a request may hold"

func init() {
	// The library makes its own errors with these functions, and their schema from the type.
	huma.NewError = func(status int, msg string, errs ...error) huma.StatusError {
		return requestError(nil, status, msg, errs...)
	}
	huma.NewErrorWithContext = requestError
	huma.DefaultArrayNullable = false
}

// requestError describes the library's findings about a request. It does not repeat values of the
// request.
func requestError(ctx huma.Context, status int, msg string, errs ...error) huma.StatusError {
	e := &APIError{status: status, Message: msg, Fix: seeDocument}
	var parts []string
	for _, err := range errs {
		var d huma.ErrorDetailer
		switch {
		case err == nil:
		case !errors.As(err, &d):
			parts = append(parts, err.Error())
		default:
			detail := d.ErrorDetail()
			parts = append(parts, strings.TrimPrefix(detail.Location+": "+detail.Message, ": "))
			if near := nearestProperty(ctx, detail); near != "" {
				e.Fix = fmt.Sprintf("the nearest name is %q; %s", near, seeDocument)
			}
		}
		if len(parts) == 5 {
			parts = append(parts, "…")
			break
		}
	}
	if len(parts) > 0 {
		e.Message += ": " + strings.Join(parts, "; ")
	}
	switch {
	case status == http.StatusUnsupportedMediaType:
		e.Fix = "send JSON, with the header Content-Type: application/json"
	case status >= 500:
		e.Fix = "look at the sidecar's log"
	}
	return e
}

// nearestProperty returns the property that an unknown one of the body was probably meant to be, or
// "".
func nearestProperty(ctx huma.Context, d *huma.ErrorDetail) string {
	name, inBody := strings.CutPrefix(d.Location, "body.")
	if ctx == nil || !inBody || d.Message != "unexpected property" ||
		ctx.Operation().RequestBody == nil {
		return ""
	}
	var names []string
	for _, media := range ctx.Operation().RequestBody.Content {
		s := media.Schema
		if s != nil && s.Ref != "" {
			s = ctx.Operation().Metadata[registryKey].(huma.Registry).SchemaFromRef(s.Ref)
		}
		if s != nil {
			for p := range s.Properties {
				names = append(names, p)
			}
		}
	}
	slices.Sort(names)
	return settings.Nearest(name, names)
}

// registryKey is the key of the schema registry in an operation's metadata.
const registryKey = "registry"

// operationError gives an operation's error a status and a fix, unless it has them.
func operationError(err error) error {
	var e *APIError
	switch {
	case errors.As(err, &e):
		return e
	case errors.Is(err, tiers.ErrBusy):
		return apiError(http.StatusServiceUnavailable, "try again in a moment, or ask for less",
			"%v", err)
	case errors.Is(err, stack.ErrOff):
		return apiError(http.StatusServiceUnavailable,
			"GET /v1/tiers says what failed; it is tried again by itself", "%v", err)
	case errors.Is(err, tiers.ErrClosed):
		return apiError(http.StatusServiceUnavailable, "ask this sidecar's successor", "%v", err)
	case errors.Is(err, tiers.ErrInvalid):
		return apiError(http.StatusBadRequest, seeDocument, "%v", err)
	case errors.Is(err, tiers.ErrNotFound), errors.Is(err, tiers.ErrStale):
		return apiError(http.StatusNotFound,
			"GET /v1/status, /v1/tiers and /v1/pins list what there is", "%v", err)
	}
	// By the contract of tiers, all other errors are failures of a medium or a server.
	return apiError(http.StatusBadGateway,
		"GET /v1/tiers and the sidecar's log say which tier fails", "%v", err)
}

// write sends the error as the response, without waiting for the body of the request.
func (e *APIError) write(w http.ResponseWriter) {
	w.Header().Set("Connection", "close")
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(e.status)
	_ = json.NewEncoder(w).Encode(e) // the client may have left
}
