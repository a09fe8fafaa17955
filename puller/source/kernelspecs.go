package source

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"unicode"
)

// stanzas are the parts of a kernelspec's metadata that can name images. The first one that names any is used; the
// order is that of the puller of Enterprise Gateway.
var stanzas = [...]string{"process_proxy", "kernel_provisioner"}

// imageKeys are the keys of a stanza's config that name an image.
var imageKeys = [...]string{"image_name", "executor_image_name"}

// maxImageLength is far more than a reference can have (255 bytes of name, 128 of tag, a digest).
const maxImageLength = 4096

// parseKernelspecs reads the answer of GET /api/kernelspecs. The error is a problem. A text of the answer is redacted
// before it is cut and quoted for a warning.
func parseKernelspecs(body []byte, redact func(string) string) (Answer, error) {
	specs, err := decodeKernelspecs(body)
	if err != nil {
		return Answer{}, err
	}
	var answer Answer
	if len(specs) == 0 {
		answer.Warnings = []string{"the gateway lists no kernelspecs"}
	}
	for _, name := range slices.Sorted(maps.Keys(specs)) {
		r := specReader{redact: redact}
		r.read(specs[name])
		answer.Images = append(answer.Images, r.images...)
		for _, fault := range r.faults {
			answer.Warnings = append(answer.Warnings, fmt.Sprintf("kernelspec %.100q: %s", redact(name), fault))
		}
	}
	answer.Images = clean(answer.Images)
	return answer, nil
}

// decodeKernelspecs returns the kernelspecs by name, each still as bytes, so that a bad one is alone in being bad.
// Objects are read into maps all over this file: Go matches the fields of a struct in any letter case, Jupyter does not.
func decodeKernelspecs(body []byte) (map[string]json.RawMessage, error) {
	var whole json.RawMessage
	decoder := json.NewDecoder(bytes.NewReader(body))
	switch err := decoder.Decode(&whole); {
	case errors.Is(err, io.EOF):
		return nil, problem("the answer is empty")
	case errors.Is(err, io.ErrUnexpectedEOF):
		return nil, problem("the answer ends in the middle")
	case err != nil: // not shown, it quotes the answer
		return nil, problem("the answer is not JSON")
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return nil, problem("more follows the JSON in the answer")
	}
	var fields, specs map[string]json.RawMessage
	if json.Unmarshal(whole, &fields) != nil || json.Unmarshal(fields["kernelspecs"], &specs) != nil || specs == nil {
		return nil, problem("the answer is JSON without a kernelspecs object: is this the gateway's address?")
	}
	return specs, nil
}

// specReader collects what one kernelspec names and what is wrong with it. What is absent is no fault: the kernelspec
// of an ordinary local kernel names no image. A null is one, as whoever wrote it meant something to be there.
type specReader struct {
	redact func(string) string
	images []string
	faults []string
}

func (r *specReader) read(raw json.RawMessage) {
	entry := r.object("the entry", raw)
	spec := r.object("spec", entry["spec"])
	metadata := r.object("metadata", spec["metadata"])
	for _, stanza := range stanzas {
		config := r.object(stanza+".config", r.object(stanza, metadata[stanza])["config"])
		for _, key := range imageKeys {
			r.image(stanza+".config."+key, config[key])
		}
		if len(r.images) > 0 {
			return
		}
	}
}

// object returns the fields of an object, none where it is absent or something else.
func (r *specReader) object(where string, raw json.RawMessage) map[string]json.RawMessage {
	if raw == nil {
		return nil
	}
	var fields map[string]json.RawMessage
	if json.Unmarshal(raw, &fields) != nil || fields == nil {
		r.fault("%s is %s, not an object", where, kind(raw))
	}
	return fields
}

// image adds the image that a value names.
func (r *specReader) image(where string, raw json.RawMessage) {
	if raw == nil {
		return
	}
	var value *string
	if json.Unmarshal(raw, &value) != nil || value == nil {
		r.fault("%s is %s, not a string", where, kind(raw))
		return
	}
	switch image := strings.TrimSpace(*value); {
	case image == "":
		r.fault("%s is empty", where)
	case len(image) > maxImageLength:
		r.fault("%s has %d bytes, more than %d", where, len(image), maxImageLength)
	case strings.ContainsFunc(image, unicode.IsControl):
		r.fault("%s holds a control character: %.100q", where, r.redact(image))
	default:
		r.images = append(r.images, image)
	}
}

func (r *specReader) fault(format string, args ...any) {
	r.faults = append(r.faults, fmt.Sprintf(format, args...))
}

// kind names the JSON type of a valid value.
func kind(raw json.RawMessage) string {
	switch raw[0] {
	case 'n':
		return "null"
	case 't', 'f':
		return "a boolean"
	case '"':
		return "a string"
	case '[':
		return "a list"
	case '{':
		return "an object"
	}
	return "a number"
}
